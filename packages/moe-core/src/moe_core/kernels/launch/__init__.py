"""Starting kernels: dispatch, recording and replay, compiling ahead or for a GPU that is not here."""
