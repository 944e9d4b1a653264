"""Alerts: rules over recorded history, raised with a code, a severity, the evidence and what to try next.

The same rules run inside a training run (`reasonrl.train`), on finished runs and other trainers' logs
(`analysis diagnose`) and as a transformers callback (`reasonrl.callbacks`). docs/alerts.md lists them.
"""

from reasonrl.alerts.config import AlertsConfig
from reasonrl.alerts.edge import edge_alert
from reasonrl.alerts.history import History
from reasonrl.alerts.monitor import AlertMonitor
from reasonrl.alerts.plugins import alert_rule, load_rules
from reasonrl.alerts.types import Alert, Finding, Rule

__all__ = [
    "Alert",
    "AlertMonitor",
    "AlertsConfig",
    "Finding",
    "History",
    "Rule",
    "alert_rule",
    "edge_alert",
    "load_rules",
]
