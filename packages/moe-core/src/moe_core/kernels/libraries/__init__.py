"""What schemes' adapters of kernel libraries share: bases, layouts, limits.  Imports no library."""
