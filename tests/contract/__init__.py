"""Promises of the product, tested through its public face alone: `mlx_specdec.__all__`, the command
line, HTTP and files. These tests and the support modules that they use import no inner module of
the package, so that they hold whatever stands behind the face."""
