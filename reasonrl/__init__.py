"""One reinforcement-learning run of a reasoning model: trainer, metrics, alerts."""

__version__ = "0.1.0"
