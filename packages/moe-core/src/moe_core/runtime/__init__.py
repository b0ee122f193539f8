"""One call of a layer: the kernel, its launches, compiling and recording them."""
