"""The one exception of cuflash's own: what is sound but has no kernel."""


class Unsupported(NotImplementedError):
    """A sound call that no kernel computes; the message names the limit and what there is."""
