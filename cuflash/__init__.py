"""cuflash: exact attention, forward and backward, for anyone who holds arrays.

The public names are here. Importing cuflash imports NumPy alone: no framework, no CUDA context.

How a call flows, and who knows what (each imports only what stands below it):

    cli, info          the command; what is on this machine
    demo, demo_sweep   a layer trained on a text; time and memory over the length
    api                the public calls and their docstrings
    repeat             a call like an earlier one: only the addresses are new
    report, picture    what explain tells; masks to look at
    call               one call: allocate, run, hand back; kept by shapes and options
    cpu                a back end: forward, backward, tiles, careful (where a result is not finite)
    gpu                the other: launch, module (compile, load), schedule (what is launched),
                       source (text); for Hopper tensor_map (copy engine), wgmma (instructions)
    plan               the choice among kernel families, and its reasons
    simt, sm90         the families, for any GPU and for Hopper: a Config and a table of tiles each
    config, family     what every Config has; the family that a caller forces
    problem, combine   every rule about shapes and options; the one mask and score of a call
    masks, neighborhood, scores, order    each as one expression; permutations of tokens
    expr               expressions: nodes, functions, operations, expression (structure, values),
                       bounds (of a tile), interval (of a row), derivative, scoring (on tiles),
                       cuda (printer), text (of a call)
    jax                a call that XLA makes
    arrays             the only other place that knows array libraries: base (View, Library), a file
                       a library (dlpack: all others), captured (by masks and scores)
    reference, cost    the definition in float64; bytes and FLOPs
    errors             the one exception of cuflash's own
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
