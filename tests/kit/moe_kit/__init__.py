"""What tests of several packages of this repository share; the kit for other packages is `moe_core.testing`."""
