"""Forms of operations for TPUs, in plain jnp: `tpu_products`."""
