"""The arrays of a model and the products with them.

In the order to read: `products` multiplies by float matrices, `quantized` by int8 and int4 ones, which it
also makes; `params` is the tree of parameter shapes and logical axes, the one source for initialising, for
the loader's check and for byte counts, and says which type things have on which device; `layout` says how
the tree lies over a mesh; `rotation` turns weights so that activations have no outliers.

All speeds are on 2 Zen 5 cores with the shapes of Qwen2.5-0.5B, in billions of weights a second.

- Matrices keep the checkpoint's layout [out, in]: nothing is transposed while loading, and a single row reads
  each output's weights in one run (18-21 GB/s against 10-16 for [in, out]).
- Narrow products get two rows at least. XLA has a fast int8 and bfloat16 product on CPU from two rows on: one
  row runs at 0.8, two at 20 (int8) and 11 (bfloat16); a float32 row at 8 to 10, the memory's limit. So a
  single bfloat16 row is padded, and an int8 activation is split in two int8 numbers, x = step (high + low /
  254), precise to 1/64,500 of the row's largest. One row, eight and a prompt share that arithmetic, so a row
  of a batch keeps its logits. Prompts stay int8 too: tiles widened to float32 are 5% faster at 512 tokens,
  10-15% slower at 128, and half as fast on jax 0.12.
- Activations of a rotated model may be one int8 row (`rounded_product`; never the default): a prompt of 512
  takes half to two thirds of the time (2 cores of a Xeon with AMX), a tenth of it for rotations. Up to 64
  rows go with the matrix in front, one row beside a row of zeros: no slower than two.
- Few rows multiply with the matrix in front (`in_front`): float32 8.2, not 5.5, at 2 rows, 3.8, not 3.0, at
  32; int8 21-26, not 15-22, but at wide outputs on jax 0.12 2, not 20: hence its limits.
- What has no fast product (float16; int4 from nine rows on) is widened a tile of outputs at a time
  (`tile_by_tile`). Tiles of 1 to 4 MiB are equally fast where they divide the outputs evenly; a last tile
  that repeats half of the one before cost 20%.
- A matrix with a side of 64 at most has more scales: in so small a model 1% of the tokens are near ties. On
  stories260K one scale per output agrees with float32 in 98.6% of the tokens, one per 8 inputs with the best
  of 11 steps in 99.3%. Larger matrices keep one scale, and so the fast product.
- A row of int4 reads half the bytes of int8 and is no faster (14-20): converting and adding its numbers one
  by one costs what that saves. Slower still: unpacking to int8 tiles for XLA's product, q, k and v or gate
  and up as one matrix, 8 or 32 bytes a sum. On 2 cores of a Xeon sums of 16 bytes run at 27, of 8 at 18, and
  two rows take a third, eight four fifths of what tiles take.
- What a program needs beside its arguments counts twice where layers are programs of their own: where malloc
  gives it back after each, every 4 KiB of the next is a page fault. At 3 MB a layer (sums of 8 bytes, zero
  points by themselves) a token of int4 met 18,000, for a quarter of its time; at 1 MB 6,800.
"""
