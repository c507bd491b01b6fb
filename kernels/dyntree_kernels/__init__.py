"""Attention and KV-cache kernels for token trees.

Every implementation of tree attention shares one contract::

    tree_attention(q, key_cache, value_cache, isa, block_table, ctx_lens, qo_indptr,
                   ancestor_bits, out, scale)

- q, out: [T, H, D]. The cache already holds every row, context and tree.
- key_cache, value_cache, isa: [blocks, Hkv, N, D], packed as `isa` says. On CUDA one `kv_cache`
  [blocks, Hkv, N, 2 * D] stands in their place, keys before values, in any physical order.
- block_table: int32 [R, max_blocks].
- ctx_lens: int [R], leading cache positions of a request that all of its rows see; -1 marks a
  request without a tree, whose rows of `out` are left untouched.
- qo_indptr: int32 [R + 1], the rows of request r are qo_indptr[r] : qo_indptr[r + 1].
- ancestor_bits: int32 [T, words], little endian: bit c of row t is set when the row sees cache
  position ctx_lens[r] + c. Every row sees at least one position. A column that no row of a
  request sees is never read, so rows and columns need not be equal in number: a verification
  step has a column per node, a draft step has few rows over all scratch positions.
- Softmax and both products are accumulated in fp32.
"""
