"""Pallas kernels for attention, the append to a cache, matrix products, linear attention, Mamba-2, the greedy
token, and a sampler's pass over the logits.

Each kernel has a plain jnp reference of the same name in `reference`, `reference_products`,
`reference_append`, `reference_delta` or `reference_mamba`. The exceptions are `delta_drafts` and `route`,
whose reference is a layer of the library that uses this package. The package does not import that library.

Reading order:

- `dispatch` chooses the implementation of a call: `select`, `run_kernel`, and `assume_device`, to compile for
  a GPU or TPU that is not here.
- `support` says which arguments each kernel takes.
- `key_layouts` and `mxfp4` have the forms of keys and of experts.
- `mosaic` has kernels for Hopper (TMA, wgmma).
- `triton` has kernels for Ampere and newer, through a backend that JAX has deprecated.
- `tpu` has kernels for TPUs.
- `compat` has the differences between versions of jax.

Choice of a kernel:

- Shapes, dtypes and the NVIDIA GPU or TPU of the process (all its devices are taken to be alike) decide,
  never the default device. If there is a GPU, a call becomes `lax.platform_dependent(cuda=kernel,
  default=jnp)`. If there is a TPU, it has `tpu=kernel`. Without either, only the jnp path is used, and Pallas
  is not imported. A named `impl` runs, or raises with the reason.
- On Hopper, attention takes Mosaic's kernels for bfloat16 and float16 keys, and Triton's kernels for other
  keys. wgmma would compute float32 as TF32, and Mosaic has no conversion of 8-bit tiles to operands of wgmma
  without another pass through shared memory.
- Mosaic's entry point disables the check of `jax.shard_map` inside, so results must be marked as varying
  (`match_varying_axes`).

Attention:

- Attention kernels read contiguous caches, rings, and pages through the block table. Nothing is gathered
  before. A block of keys is one slice of slots, since its size divides a page and a ring.
- Quantized keys stay levels in the products: q · (low + step · level) = low · Σq + step · (q · level), and
  the weights of values are multiplied by the step. Levels are exact in bfloat16.
- A bias of keys that RoPE rotates has a table of 64 positions. For each block the queries are rotated back by
  the angle of its first position. On TPUs the queries are rotated once for each 64 keys.
- Decode attention takes up to 17 queries of a row (draft tokens and the token before). It splits the key
  blocks that a row needs, not the capacity, among its programs. There are two programs per multiprocessor
  over all rows and heads, a static number.
- Triton's programs are not split if rows and heads give about one program per multiprocessor: small keys
  would gain a tenth of their bytes in partial results. Then one program has to keep enough loads in flight,
  so it has up to 8 stages.
- The G queries of a key head, of all tokens, are rows of one tile. This wastes arithmetic, which is free
  while memory is the limit.
- The keys of latent attention (`Latents`) have their values as their first numbers. A block is loaded once
  for both products. All heads share it, so partial results are large: there is one split per multiprocessor.
- Values beyond the length are zeros: a weight of 0 does not remove a NaN. Triton loads them with a mask.
  Mosaic writes zeros to shared memory, in the one block that contains the end. In prefill the warpgroup that
  loads writes them before it passes the block on, so there is no race.
- TMA needs multiples of 8 rows and of 16 columns. A cache has such a number of slots. Other widths and
  vocabularies are padded, with a copy per call.

Attention on TPUs:

- In a prompt a tile is 256 tokens of one head, and four tiles are computed together, so that products overlap
  the softmax. Only the last steps of keys are masked.
- TPUs keep keys and values `SideBySide`. Their attention kernel serves prompts and decode steps, and copies
  blocks of about 1 MiB to two buffers on the chip, of all key heads at once.
- The blocks of all rows and tiles of queries are one sequence, so the first block of a row is copied while
  the last block of the previous row is computed. A copy takes a page, or 128 slots of a row. Slots that no
  query sees are neither copied nor computed.
- If H = 64, a TPU multiplies whole vectors of 128: q with 64 zeros times [k | v] gives the scores, and the
  weights times [k | v] give the sum of values in the second half. Half of the arithmetic is wasted, but no
  reading is. Wider heads are cut at a boundary of lanes.
- Keys and values past the length are zeros on TPUs too. They are written to the buffer, at the ends of the
  part that a tile of queries sees, because the copy left the earlier content there. Levels are never NaN, and
  their scales are masked.
- Queries of latents and their results are put into rows by XLA: 128 heads of 576 numbers would not fit in
  on-chip memory in the form of products. Keys of 576 numbers are stored in 640, of which the last are zeros.
- The scale of int8 pages is [P, K, 2, 128], not [P, K, 4, 64], whose lanes would be half empty.
- A kernel's arrays of the cache are bound to HBM (`with_memory_space_constraint`): XLA copied the scales of a
  small cache to on-chip memory first.

Append on TPUs:

- TPUs copy tiles of 8 (32 bits), 16 or 32 slots (8 bits), not single slots. The append reads, changes and
  writes the tiles that a row's tokens touch. All reads of a program are in flight at once. Tiles that are
  written whole are not read.
- If a row has up to 17 tokens, the append also computes norms of heads, RoPE and levels while tiles are read.
  For prompts XLA computes them before the kernel.
- Between a layer's products XLA has nothing to do in a decode step: each small operation of it would cost
  about 2,100 cycles. So the append reads queries, keys and values as products leave them, with the numbers of
  all heads in lanes. The attention kernel reads and writes this form too, and puts the heads of a key head
  into rows itself. The choice of experts is a kernel with the norm before it (`tpu/route.py`).

Products and logits:

- The greedy token of a float or int8 vocabulary needs no logits.
- A sampler reads the logits once: for the largest of each group of 64, which give the candidates, and for the
  logsumexp. The bias of a row without one, and the seen tokens of a row without a penalty, are not read: a
  kernel needs no branch for that.
- Adapters of rows (LoRA) are part of a product: each adapter that some row has is read once, for all of its
  rows. For Triton, XLA multiplies x by the first matrices. On TPUs a separate kernel copies both matrices
  (`tpu/adapters.py`).
- A TPU's products of up to 64 rows have their matrices in on-chip memory if they are small: XLA copies them
  there while operations before run. Larger matrices are streamed from HBM by the kernel, which computes
  meanwhile (`tpu/products.py`). No TPU kernel reads float16, so scales of int4 are float32 there.

Mixtures of experts:

- There are kernels for Triton, which serve Hopper too, and for TPUs.
- For Triton choices are sorted by expert. Each program finds its tile in that order by itself, which saves
  launches. jax's `ragged_dot_mgpu` computes a whole tile for each of the X - 1 tiles that may be empty, and
  needs x gathered in the sorted order. `megablox` for TPUs needs that too, and three calls.
- Triton's kernels take biases, gpt-oss's clamped values, and quantized matrices. They unpack int8 and FP8,
  and int8 or int4 in groups, as products do (`triton/fp8.py`, `triton/groups.py`). They unpack MXFP4 by a
  table (`triton/mxfp4.py`).
- On TPUs one kernel streams the experts that some token chose. Up to 64 tokens are all multiplied by each
  expert, since reading is the limit. If there are more tokens, a tile of an expert takes its rows from the
  tokens on the chip, and adds its results there, by products with matrices of zeros and ones.

Linear attention:

- A decode step is one kernel (`delta_step`) for everything between products: the convolution, norms, decay,
  delta rule and gated norm. It writes the state in place.
- On TPUs a grid step has about 1 MiB of the state, and rows without a token copy nothing, unless no row has
  one. Products with the state are sums on the vector unit: reading is the limit, and a matrix unit would
  round float32. XLA stores the convolution's inputs [B, heads, W, H] with W before the heads, so the kernel
  takes them in this order.
- A call with draft tokens (`delta_drafts`) applies the accepted ones of the call before and then its own, one
  after the other, with the state on the chip. XLA computes convolution and norms.
- Prompts go in blocks of 64 tokens. A float32 product is six products of parts: each operand has three parts
  in bfloat16. On TPUs they are one product, six times as deep, since 64 or 128 numbers fill only a part of a
  matrix unit. On GPUs the part that does not read the state is a separate kernel, for all blocks at once.

Mamba-2:

- A decode step is one kernel on TPUs, from the input product to the gate, and writes the state in place. Its
  grid goes through the heads of a row before the next row, since all heads of a group read the same inputs of
  b and c. A product with ones on the matrix unit puts each number of x into all lanes.
- The state has the axis S in lanes. XLA stores inputs of x in the order of axes that leaves the fewest lanes
  empty, and the kernel takes both: heads before their numbers, or after.
- Prompts go in blocks of 64 tokens, without a system of equations. On TPUs two heads of width 64 are side by
  side in lanes. On GPUs b and c, and the part of prompts that does not read the state, are separate kernels.
- Calls with draft tokens have no kernel.
"""

from . import reference as reference
from .dispatch import (
    IMPLS as IMPLS,
    KERNELS as KERNELS,
    Selection as Selection,
    assume_device as assume_device,
    default_platform as default_platform,
    device_impl as device_impl,
    match_varying_axes as match_varying_axes,
    platform_of as platform_of,
    platforms as platforms,
    run_kernel as run_kernel,
    run_on_platform as run_on_platform,
    select as select,
    unavailable_reason as unavailable_reason,
)
from .key_layouts import (
    BIAS_STRIDE as BIAS_STRIDE,
    HeadNorms as HeadNorms,
    KeyBias as KeyBias,
    Latents as Latents,
    Levels as Levels,
    SideBySide as SideBySide,
)
from .mxfp4 import Mxfp4 as Mxfp4
