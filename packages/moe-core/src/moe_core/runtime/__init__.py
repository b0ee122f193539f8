"""Runtime: the kernel of a layer, its calls, and compiling and recording their launches."""
