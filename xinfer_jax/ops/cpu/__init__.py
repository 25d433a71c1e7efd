"""Forms of operations for CPUs: `cpu_features` says what the CPU multiplies fast; `product_table` has forms
of products; `cpu_products` multiplies by float and int8 matrices; `cpu_sampler` samples tokens; `layer_forms`
has attention, experts and the step of linear attention.
"""
