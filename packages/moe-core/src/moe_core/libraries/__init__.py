"""What schemes' adapters of kernel libraries share: layouts and limits.  Imports no library."""
