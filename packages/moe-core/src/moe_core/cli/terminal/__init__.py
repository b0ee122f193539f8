"""The process and its terminal: streams and signal handling. Commands print through it."""
