"""The arrays of a model and the products with them.

In the order to read: `processor` says what the processor multiplies fast, `products` multiplies by float
matrices in the form that suits it, `ternary` by BitNet's, `quantized` by int8 and int4 ones, and makes them;
`params` is the tree of parameter shapes and logical axes, the one source for initialising, for the loader's
check and for byte counts, and says which type things have on which device; `layout` says how the tree lies
over a mesh; `rotation` turns weights so that activations have no outliers.

Speeds are in billions of weights a second, with the shapes of Qwen2.5-0.5B ([4864, 896], [896, 4864]): on 2
Zen 5 cores where nothing else is said; the form by processor on 2 cores of a Xeon with AMX, whole, with its
AMX hidden ("VNNI") and with its AVX-512 hidden too ("AVX2"), by CPUID.

- Matrices keep the checkpoint's layout [out, in]: nothing is transposed while loading, and a single row
  reads each output's weights in one run (18-21 GB/s against 10-16 for [in, out]).
- Narrow products get two rows at least. XLA has a fast int8 and bfloat16 product on CPU from two rows on:
  one row runs at 0.8, two at 20 (int8) and 11 (bfloat16); a float32 row at 8 to 10, the memory's limit. So
  a single bfloat16 row is padded, and an int8 activation is split in two int8 numbers, x = step (high + low
  / 254), precise to 1/64,500 of the row's largest. Sums of int8 are exact: whatever the form, the same
  bits.
- Activations of a rotated model may be one int8 row (`rounded_product`; never the default): a prompt of 512
  takes half to two thirds of the time (2 cores of a Xeon with AMX), a tenth of it for rotations. One row
  goes beside a row of zeros: as fast as two.
- Few rows multiply with the matrix in front (`in_front`): float32 8.2, not 5.5, at 2 rows, 3.8, not 3.0, at
  32. How few depends on the processor. What that gives is transposed, and a bfloat16 product with the
  matrix behind needs a barrier before it: XLA takes the transpose in and has no such product. int8, one
  row, in front · behind: AMX 18, 20 · 11, 14 (the vocabulary's matrix 22 · 13); VNNI 10, 10 · 8, 8; AVX2 8,
  8 · 10, 11 (Zen 3: 4.8, 5.3 · 9.6, 6.3). Eight rows, GFLOP/s: AMX 160, 104 · 134, 84; AVX2 76, 49 · 65,
  38. On jax 0.12 wide outputs in front run at 3, not 13, with VNNI alone: hence the limit. bfloat16, one
  row: AMX 10, 11 · 7, 9; AVX2 4, 5 · 5, 7.
- Prompts stay int8 where XLA multiplies it fast. GFLOP/s at 512 rows, int8 · widened to float32 · float32:
  AMX 500, 580 · 230, 250 · 265, 270; VNNI on jax 0.10 146, 159 · 254, 250 · 265, 280, on 0.12 335, 387 ·
  226, 235 · 280, 275; AVX2 107, 109 · 162, 180 · 170, 182. bfloat16 likewise: AVX2 145, 148 · 162, 180.
- What has no fast product (float16; int4 from nine rows on) is widened a tile of outputs at a time
  (`tile_by_tile`). A tile of 8 MiB is 1.3 times as fast as one of 2 at 16 rows, 1.06 at 512; what a tile
  costs is not widening it but its product beginning anew, so float32 matrices in tiles are as slow.
- A matrix with a side of 64 at most has more scales: in so small a model 1% of the tokens are near ties. On
  stories260K one scale per output agrees with float32 in 98.6% of the tokens, one per 8 inputs with the
  best of 11 steps in 99.3%. Larger matrices keep one scale, and so the fast product.
- A row of int4 reads half the bytes of int8 and is no faster (14-20): converting and adding its numbers one
  by one costs what that saves. Slower still: unpacking to int8 tiles for XLA's product, q, k and v or gate
  and up as one matrix, 8 or 32 bytes a sum. On 2 cores of a Xeon sums of 16 bytes run at 27, of 8 at 18,
  and two rows take a third, eight four fifths of what tiles take.
- A ternary row is bits in common of planes, counted: a quarter of int8's bytes in half its time or less
  (`ternary` says what else was tried). Its sums are whole numbers, so no form of the product changes a bit.
- What a program needs beside its arguments counts twice where layers are programs of their own: where
  malloc gives it back after each, every 4 KiB of the next is a page fault. At 3 MB a layer (sums of 8
  bytes, zero points by themselves) a token of int4 met 18,000, for a quarter of its time; at 1 MB 6,800.
"""
