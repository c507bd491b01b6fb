"""Attention and KV-cache kernels for token trees.

Every implementation of tree attention shares one contract::

    tree_attention(q, key_cache, value_cache, isa, block_table, ctx_lens, qo_indptr,
                   ancestor_bits, out, features)

- q, out: [T, H, D], rows of all requests. The cache already holds them, and their context.
- key_cache, value_cache, isa: [blocks, Hkv, N, D], packed for the instruction set `isa`. On CUDA
  one `kv_cache` [blocks, Hkv, N, 2 * D] replaces them: keys before values, in any physical order.
  Their type is that of q, or float8_e4m3fn with scales among the features. Then q on CUDA may have
  that type as well, and `out` decides in which type products are made.
- block_table: int32 [R, max_blocks]. Positions beyond it are in block 0, vLLM's null block.
- ctx_lens: int [R], number of leading cache positions that all rows of a request see. -1 marks a
  request without a tree: its rows of `out` are not changed.
- qo_indptr: int32 [R + 1]; request r has the rows qo_indptr[r] : qo_indptr[r + 1].
- ancestor_bits: int32 [T, words], little endian: row t sees cache position ctx_lens[r] + c if its
  bit c is set. Every row sees at least one position. A column that no row of a request sees is
  never read, so the numbers of rows and columns may differ: verification has one column per node,
  and a draft forward has few rows over all scratch positions.
- features: `LayerFeatures` of the layer. A kernel raises ValueError for features that it does not
  serve (`features.SERVED`). The position of a row is ctx_lens[r] plus the number of its bits minus
  1; with the feature `both_ways` it is ctx_lens[r] plus the number of rows of r before it. A window
  must have more positions than any row has bits: it hides parts of the context alone.
- Softmax and both products are accumulated in fp32.
- With the option `by_path`, where a kernel has it, the sums of a row run in the order of positions:
  the ancestor at depth d stands at ctx_lens[r] + d. So a row of a tree has the bits of a plain row,
  which is a chain of one.
"""
