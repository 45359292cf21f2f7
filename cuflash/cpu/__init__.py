"""The CPU back end: attention tile by tile in NumPy, forward and backward, O(N) memory.

A tile is at most `blocks(problem)` queries x keys of one or more heads; no other array of that size
exists, so memory grows with the sequence and never with its square. The products are BLAS calls in
the accumulation type (float32; float64 for float64 input), the softmax is online: a running maximum
and a running sum a row. The query heads that share a key head are rows of one product.

Values at which the arithmetic of a tile fails (a masked pair that holds NaN, a dot product that
overflows although scale * dot does not) show as a result that is not finite. One test a product
finds them, and `careful.py` computes that tile again by selection and, if need be, in a wider type.

References
----------
Dao 2023, arXiv:2307.08691, Algorithms 1 and 2; Milakov and Gimelshein 2018, arXiv:1805.02867;
`reference.py` for the formulas.
"""

from cuflash.cpu.backward import backward
from cuflash.cpu.forward import forward
from cuflash.cpu.tiles import blocks

__all__ = ["backward", "blocks", "forward"]
