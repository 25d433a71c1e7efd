"""The parameters of a model, quantized weights, and matrix products with both.

In the order to read: `param_specs` is the tree of parameter shapes and logical axes, the one source for
initialisation, for the loader's check and for byte counts; `params` does the first and the last, and chooses
dtypes; `layout` says how the tree is divided over a mesh. `weight_leaf` is the protocol of leaves that are no
float arrays, `quantized_weight` their common part. A kind is a file: `int8_weight`, `grouped_weight` (int4),
`ternary` (BitNet), `mxfp4` (gpt-oss's experts). `quantize_methods` lists methods, `quantization` quantizes;
`hadamard` rotates weights so that activations have no outliers.

Speeds are in billions of weights a second, with the shapes of Qwen2.5-0.5B ([4864, 896], [896, 4864]): on 2
Zen 5 cores unless stated otherwise. Forms by CPU were measured on 2 cores of a Xeon with AMX: as it is
("AMX"), with AMX hidden ("VNNI"), and with AVX-512 hidden too ("AVX2"), by CPUID.

- Matrices keep the checkpoint's layout [out, in]: nothing is transposed while loading, and the product of a
  single row reads each output's weights contiguously (18-21 GB/s against 10-16 for [in, out]).
- Narrow types need at least two rows. XLA has a fast int8 and bfloat16 product on CPU from two rows on: one
  row runs at 0.8, two at 20 (int8) and 11 (bfloat16); one float32 row at 8 to 10, the memory's limit. So a
  single bfloat16 row is padded, and an int8 activation is split into two int8 numbers, x = step (high + low /
  254), precise to 1/64,500 of the row's largest. Sums of int8 are exact, so every form gives the same bits.
- Activations of a rotated model may be one int8 row (`int8_activation_product`; never the default): a prompt
  of 512 takes half to two thirds of the time (2 cores of a Xeon with AMX), a tenth of it for rotations. A
  single row is multiplied together with a row of zeros: as fast as two rows.
- Few rows multiply with the matrix as the left operand, (matrix @ x.T).T (`matrix_lhs_dot`): float32 8.2
  instead of 5.5 at 2 rows, 3.8 instead of 3.0 at 32. The limit depends on the CPU. The result is transposed.
  A bfloat16 product with the matrix as the right operand needs a barrier before it: XLA would fuse the
  transpose into the product, and has no fast product of that kind. int8, one row, matrix left · right: AMX
  18, 20 · 11, 14 (the vocabulary's matrix 22 · 13); VNNI 10, 10 · 8, 8; AVX2 8, 8 · 10, 11 (Zen 3: 4.8, 5.3 ·
  9.6, 6.3). Eight rows, GFLOP/s: AMX 160, 104 · 134, 84; AVX2 76, 49 · 65, 38. On jax 0.12 with VNNI and
  without AMX, wide outputs run at 3 instead of 13 with the matrix left: hence the limit on outputs. bfloat16,
  one row: AMX 10, 11 · 7, 9; AVX2 4, 5 · 5, 7.
- Prompts are multiplied in int8 where XLA does that fast. GFLOP/s at 512 rows, int8 · converted to float32 ·
  float32: AMX 500, 580 · 230, 250 · 265, 270; VNNI on jax 0.10 146, 159 · 254, 250 · 265, 280, on 0.12 335,
  387 · 226, 235 · 280, 275; AVX2 107, 109 · 162, 180 · 170, 182. bfloat16 likewise: AVX2 145, 148 · 162, 180.
- Types without a fast product (float16; int4 from nine rows on) are converted to float32 a tile of outputs at
  a time (`tiled_product`). A tile of 8 MiB is 1.3 times as fast as one of 2 at 16 rows, 1.06 at 512. The cost
  of a tile is the start of its product, not the conversion, so float32 matrices in tiles are as slow.
- A matrix with a side of at most 64 has more scales: in so small a model 1% of the tokens are near ties. On
  stories260K one scale per output agrees with float32 in 98.6% of the tokens, one per 8 inputs with the best
  of 11 steps in 99.3%. Larger matrices keep one scale per output, and so the fast product.
- A row of int4 reads half the bytes of int8 and is no faster (14-20): converting and adding numbers one by
  one costs what the bytes save. Slower still: unpacking to int8 tiles for XLA's product, q, k and v or gate
  and up as one matrix, 8 or 32 bytes a sum. On 2 cores of a Xeon sums of 16 bytes run at 27, of 8 at 18; two
  rows take a third, eight rows four fifths of the time of tiles.
- A ternary row counts the common bits of two bit planes: a quarter of int8's bytes in half its time or less
  (`ternary` lists what else was tried). Its sums are integers, so every form of the product gives the same
  bits.
- Temporary memory of a program counts twice where each layer is a program of its own: where malloc returns it
  to the system after each program, every 4 KiB of the next is a page fault. At 3 MB a layer (sums of 8 bytes,
  separate zero points) a token of int4 met 18,000 page faults, a quarter of its time; at 1 MB 6,800.
"""
