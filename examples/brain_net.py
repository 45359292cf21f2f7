"""The net of `brain_mri.py`: layers of 3-D windowed attention and of an MLP, gradients by hand.

Each layer adds to x: first attention of the normalised x over a window in space (left out in the
baseline), then an MLP. What a cube says at the end is a small linear rule: a score for each lobe
from a voxel's place in the cube and how bright it and its neighbours are. So the net finds out
which lobes are about, and edges within a cube follow the picture.
"""

from collections.abc import Callable
from typing import Any

import nn
import numpy as np
from brain_volume import cubes, smooth

import cuflash

LOBES = 8  # background and seven
RULE = 8  # numbers a voxel brings: 1, its place in the cube, two brightnesses and their squares


class Net:
    """A volume in, scores of the lobes for each voxel out; tokens are cubes in tile order.

    Parameters
    ----------
    size : the table SMALL or FULL of `brain_mri.py`
    told : whether a cube is told where in the field of view it lies
    attend : whether the attention of each layer takes part
    """

    def __init__(self, xp: Any, size: dict[str, Any], seed: int, told: bool, attend: bool) -> None:
        self.xp, self.size, self.attend = xp, size, attend
        shape = tuple(n // size["patch"] for n in size["grid"])  # of the grid of tokens
        self.order = cuflash.order.tiles(shape, size["tile"])

        at = np.stack(np.unravel_index(self.order.positions, shape), axis=1)
        at = (2 * at + 1) / np.array(shape) - 1  # -1 to 1 in the field of view
        waves = [wave(n * np.pi * at) for n in (1, 2) for wave in (np.sin, np.cos)]
        place = np.concatenate([at, *waves], axis=1)
        self.place = xp.asarray(2 * told * place, np.float32)
        inside = (np.indices(3 * (size["patch"],)).reshape(3, -1).T + 0.5) / size["patch"]
        self.inside = xp.asarray(2 * inside - 1, np.float32)  # (voxels of a cube, 3)

        rng, width = np.random.default_rng(seed), size["width"]
        w = {"in": nn.normal(xp, rng, size["patch"] ** 3 + place.shape[1], width)}
        w |= {"out": xp.zeros((width, RULE * LOBES), np.float32)}
        w |= {"in_bias": xp.zeros(width, np.float32)}
        w |= {"out_bias": xp.zeros(RULE * LOBES, np.float32)}
        self.options = []  # of the attention of each layer
        for layer in range(size["layers"]):
            w[f"{layer}_up"] = nn.normal(xp, rng, width, 4 * width)
            w[f"{layer}_down"] = nn.normal(xp, rng, 4 * width, width) / 2
            if attend:
                w[f"{layer}_qkv"] = nn.normal(xp, rng, width, 3 * width)
                w[f"{layer}_mix"] = nn.normal(xp, rng, width, width) / 2
                offsets = (2 * (n // 2) + 1 for n in size["window"])
                table = w[f"{layer}_table"] = xp.zeros((size["heads"], *offsets), np.float32)
                table = cuflash.Param(table)  # Adam changes in place what it holds
                self.options.append({
                    "heads": size["heads"],
                    "params": {f"{layer}_table": table},
                    "score": cuflash.RelativeBias(table, shape),
                    "mask": cuflash.Neighborhood(shape, size["window"], edge="clip"),
                    "positions": self.order.positions,
                })  # fmt: skip
        self.weights = w

    def voxels(self, image: Any) -> Any:
        """What the rules weigh: (tokens, patch^3, RULE)."""
        xp, patch = self.xp, self.size["patch"]
        own, near = (cubes(x, patch, self.order) for x in (image, smooth(xp, image)))
        own, near = 2 * own - 1, 2 * near - 1
        inside = [xp.broadcast_to(self.inside[:, i], own.shape) for i in range(3)]
        columns = [xp.ones_like(own), *inside, own, own * own, near, near * near]
        return xp.stack(columns, axis=2)

    def forward(self, image: Any) -> tuple[Any, Callable[[Any], dict[str, Any]]]:
        """Scores (tokens, patch^3, LOBES) of a volume, and the pullback to all weights."""
        w, voxels = self.weights, self.voxels(image)
        tokens = self.xp.concatenate(
            [cubes(image, self.size["patch"], self.order), self.place], axis=1
        )
        x, pull_in = nn.linear(w, "in", tokens[None])  # a batch of one
        pulls = []
        for layer in range(self.size["layers"]):
            if self.attend:
                x, pull = nn.residual(nn.attention, w, f"{layer}", x, **self.options[layer])
                pulls.append(pull)
            x, pull = nn.residual(nn.mlp, w, f"{layer}", x)
            pulls.append(pull)
        y, pull_norm = nn.rmsnorm(x)
        rules, pull_out = nn.linear(w, "out", y)
        rules = rules.reshape(-1, RULE, LOBES)

        def pullback(dscores: Any) -> dict[str, Any]:
            g: dict[str, Any] = {}
            drules = voxels.swapaxes(1, 2) @ dscores
            dx = pull_norm(pull_out(drules.reshape(1, len(drules), -1), g))
            for pull in reversed(pulls):
                dx = pull(dx, g)
            pull_in(dx, g)
            return g

        return voxels @ rules, pullback
