"""One module a verb of the command line; each returns an exit status and imports what it needs, no more."""
