"""A18, the one rule that looks at a sweep and not at a run: the best value lies at the edge of its search range."""

from __future__ import annotations

import math

from reasonrl.alerts.types import Alert


def edge_alert(
    key: str, value: float, low: float, high: float, *, log: bool = False, share: float = 0.05
) -> Alert | None:
    """Return a flag when the best `value` lies within `share` of the range of an edge, else None.

    log: the range is searched on a logarithmic scale (low above 0).
    """
    lowest, highest, at = (math.log(low), math.log(high), math.log(value)) if log else (low, high, value)
    if highest <= lowest:
        return None
    place = (at - lowest) / (highest - lowest)
    if share < place < 1 - share:
        return None
    edge = "lower" if place <= share else "upper"
    if log:
        wider = (low * low / high, high) if edge == "lower" else (low, high * high / low)
    else:
        wider = (low - (high - low), high) if edge == "lower" else (low, high + (high - low))
    evidence = {"key": key, "value": value, "low": low, "high": high, "edge": edge}
    message = f"The best {key}={value:.4g} lies at the {edge} edge of {low:.4g}..{high:.4g}; look beyond."
    override = f"sweep.space.{key}=interval({wider[0]:.4g},{wider[1]:.4g})"
    return Alert("A18", "best value at the edge", "flag", 0, message, evidence, [override])
