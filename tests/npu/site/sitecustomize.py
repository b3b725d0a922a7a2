"""Python imports this at startup if the folder is on PYTHONPATH: the tests' way into Ray's workers and ranks."""

from simulated_npu.loading import install_on_import

install_on_import()
