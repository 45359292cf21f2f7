"""Lobes of a brain in a real 3-D MRI: windows of attention in space, with a learned 3-D bias.

One head is learned from (the ICBM152 average, turned, stretched, moved and shaded at random),
another person's is tested (Colin27, in poses not seen). The volume is cut into small cubes, one
token each. From its own voxels a cube knows little: grey matter looks alike everywhere. Told where
in the field of view it lies, it knows more, but heads are turned and moved. With attention it looks
at the cubes about it, too, and at how far off they are.

* `cuflash.Neighborhood` lets a token see a window of cubes along all three axes;
* `cuflash.order.tiles` stores neighbours in space next to each other, so a window fills few tiles;
* `cuflash.RelativeBias` adds a learned number for each offset in space, a `cuflash.Param`, whose
  gradient comes with dq, dk, dv. No framework: every gradient is written out.

    python examples/brain_mri.py            # on a GPU if there is one, and a pass over 512^3
    python examples/brain_mri.py --small    # on the CPU, in about a minute

The same net without attention, trained the same way, is the baseline, with and without the place
of a cube; the measure is the mean Dice of seven lobes: 2 |found and true| / (|found| + |true|).
"""

import time
from pathlib import Path
from typing import Any

import brain_512
import matplotlib
import nn
import numpy as np
from brain_net import LOBES, Net
from brain_volume import cubes, load, lobe_names, sample, whole

matplotlib.use("Agg")
from matplotlib import pyplot

SMALL = {"voxel_mm": 4.5, "grid": (36, 48, 36), "patch": 4, "tile": (3, 4, 3), "window": (5, 5, 5),
         "layers": 2, "width": 64, "heads": 2, "steps": 140, "rate": 6e-3}  # fmt: skip
FULL = {"voxel_mm": 2.25, "grid": (80, 96, 80), "patch": 4, "tile": (4, 4, 4), "window": (9, 9, 9),
        "layers": 3, "width": 128, "heads": 4, "steps": 300, "rate": 4e-3}  # fmt: skip
NETS = {
    "a cube alone": (False, False),
    "told its place": (True, False),
    "with attention": (True, True),
}


# 1. Training and testing --------------------------------------------------------------------------


def train(xp: Any, head: Any, size: dict, seed: int, label: str) -> Net:
    """One of NETS trained on one head in random poses; the same seed gives the same poses."""
    net, rng = Net(xp, size, seed, *NETS[label]), np.random.default_rng(seed + 1)
    adam = nn.Adam(net.weights, size["steps"], size["rate"])
    for show in nn.training(size["steps"], f"{label:14}"):
        image, truth = sample(xp, head, size, rng, True)
        scores, pullback = net.forward(image)
        answer = cubes(truth, size["patch"], net.order)
        weight = xp.where(answer > 0, 1.0, 0.3)  # background counts less
        loss, dscores = nn.cross_entropy(scores, answer, weight)
        adam.step(pullback(dscores))
        show(loss)
    return net


def test(xp: Any, net: Net, head: Any, poses: int = 6) -> tuple[np.ndarray, tuple[Any, ...]]:
    """Dice of each lobe, the mean over poses never trained on, and volumes of the last pose."""
    rng, size, dice = np.random.default_rng(7), net.size, []
    for _ in range(poses):
        image, truth = sample(xp, head, size, rng, False)
        found = net.forward(image)[0].argmax(axis=2)
        found = whole(found, size["grid"], size["patch"], net.order)
        both = [((found == i) & (truth == i)).sum() for i in range(1, LOBES)]
        size_of = [(found == i).sum() + (truth == i).sum() for i in range(1, LOBES)]
        dice.append([float(2 * a / b) for a, b in zip(both, size_of)])
    return np.mean(dice, axis=0), (image, truth, found)


# 2. All of it -------------------------------------------------------------------------------------


def draw(volumes: dict[str, Any], path: Path) -> None:
    """Three slices of one volume: MRI, true lobes, the lobes that each net found."""
    figure, panels = pyplot.subplots(3, len(volumes), figsize=(3.2 * len(volumes), 9))
    for row, axis in zip(panels, range(3)):
        for axes, (name, volume) in zip(row, volumes.items()):
            shown = np.take(volume, volume.shape[axis] // 2, axis=axis).T[::-1]
            style = {"cmap": "gray"} if name == "MRI" else {"cmap": "tab10", "vmin": 0, "vmax": 9}
            axes.imshow(shown, interpolation="nearest", **style)
            axes.set(title=name if axis == 0 else "", xticks=[], yticks=[])
    figure.tight_layout()
    figure.savefig(path, dpi=70)
    pyplot.close(figure)


def run(xp: Any, size: dict, out: Path, seed: int = 0, nets: Any = NETS) -> dict[str, float]:
    """Train nets on one head, test them on the other; return the mean Dice of each."""
    heads = {who: load(xp, who) for who in ("icbm", "colin")}
    names, dice, volumes = lobe_names()[1:], {}, {}
    print(f"Trained on ICBM152, tested on Colin27 (another person); {size}, seed {seed}")
    for label in nets:
        start = time.perf_counter()
        net = train(xp, heads["icbm"], size, seed, label)
        dice[label], (image, truth, found) = test(xp, net, heads["colin"])
        print(f"{label}: {time.perf_counter() - start:.0f} s")
        volumes = volumes or {"MRI": image, "true lobes": truth}
        volumes[label] = found
    lines = [[name, *(f"{each[i]:.3f}" for each in dice.values())] for i, name in enumerate(names)]
    lines.append(["mean", *(f"{each.mean():.3f}" for each in dice.values())])
    page = nn.table(["Dice", *dice], lines)
    print(f"\n{page}\n")
    out.mkdir(parents=True, exist_ok=True)
    (out / "brain-mri.md").write_text(page + "\n")
    to_host = (lambda x: x) if xp is np else xp.asnumpy
    draw({name: to_host(volume) for name, volume in volumes.items()}, out / "brain-mri.png")
    if xp is not np:
        brain_512.run(xp, out)
    return {name: float(each.mean()) for name, each in dice.items()}


if __name__ == "__main__":
    nn.start(__doc__, run, SMALL, FULL)
