"""The process and its terminal: streams, and how signals end it.  Below the commands, which print through it."""
