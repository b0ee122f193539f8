"""Device code of the MXFP4 scheme."""
