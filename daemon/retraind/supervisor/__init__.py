"""Process 1: owns the spool, the jobs, the models directory and the endpoint. Never imports torch or numpy."""
