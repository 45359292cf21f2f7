"""cuflash: exact attention, forward and backward, for anyone who holds arrays.

The public names are here. Importing cuflash imports NumPy alone: no framework, no CUDA context.

How a call flows, and who knows what (each imports only what stands below it):

    api                the public calls and their docstrings
    report, picture    what explain tells; masks to look at
    call               one call: allocate, run, hand back; kept by shapes and options
    plan, family       kernel families, their tables of tiles, the choice
    cpu, gpu           the back ends; gpu: source (text), module (compile, load), schedule, launch
    problem, combine   every rule about shapes and options; the one mask and score of a call
    masks, neighborhood, scores, order    each as one expression; permutations of tokens
    expr               expressions: nodes, operations, values, bounds, derivatives, CUDA text
    arrays, jax        the only places that know array libraries
    reference, cost    the definition in float64; bytes and FLOPs
    cli, demo, info    the command
"""

from cuflash import order
from cuflash.api import (
    Gradients,
    attention,
    attention_backward,
    attention_vjp,
    explain,
    warmup,
)
from cuflash.cost import memory
from cuflash.errors import Unsupported
from cuflash.expr.functions import cos, exp, log, maximum, minimum, sin, sqrt, tanh
from cuflash.expr.nodes import Param, captured, where
from cuflash.family import using
from cuflash.info import info
from cuflash.masks import (
    BlockLocal,
    BlockSparse,
    Causal,
    Dilated,
    Documents,
    GlobalTokens,
    Intervals,
    Mask,
    PrefixLM,
    SlidingWindow,
)
from cuflash.neighborhood import Neighborhood
from cuflash.scores import ALiBi, Bias, RelativeBias, Score, Softcap

__version__ = "0.1.0"

__all__ = [
    "ALiBi",
    "Bias",
    "BlockLocal",
    "BlockSparse",
    "Causal",
    "Dilated",
    "Documents",
    "GlobalTokens",
    "Gradients",
    "Intervals",
    "Mask",
    "Neighborhood",
    "Param",
    "PrefixLM",
    "RelativeBias",
    "Score",
    "SlidingWindow",
    "Softcap",
    "Unsupported",
    "attention",
    "attention_backward",
    "attention_vjp",
    "captured",
    "cos",
    "exp",
    "explain",
    "info",
    "log",
    "maximum",
    "memory",
    "minimum",
    "order",
    "sin",
    "sqrt",
    "tanh",
    "using",
    "warmup",
    "where",
]
