"""Products for CPUs that leaves of `weights/` call: `cpu_features` says what the CPU multiplies fast,
`product_table` has the forms of products, and `cpu_products` multiplies by float and int8 matrices.
"""
