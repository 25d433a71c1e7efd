"""Forms of operations for TPUs, in plain jnp: `tpu_products`, `tpu_embedding`."""
