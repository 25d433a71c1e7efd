"""Forms of operations for CPUs: `cpu_features` says what the CPU multiplies fast; `cpu_products` multiplies
by float and int8 matrices; `attention_by_row` attends row by row; `experts_by_tiles` takes an expert's tiles;
`recurrent_by_product` is the step of linear attention.
"""
