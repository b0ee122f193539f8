"""The ground floor of device code: starting kernels, and what all of them share. Imports nothing above it."""
