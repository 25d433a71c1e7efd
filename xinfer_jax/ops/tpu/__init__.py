"""Products for TPUs that leaves of `weights/` call: `tpu_products`."""
