"""Forms for TPUs, in plain jnp: `tpu_embedding` and `tpu_products`."""
