"""Process 2: does one job and exits, so that whatever a driver or a library breaks ends with it."""
