"""Rewrite rules of onnxscript (pattern, check, rewrite), applied to a model."""

import logging
from typing import Any

import onnx_ir as ir
from onnxscript.rewriter.pattern import MatchingTracer, MatchResult, RewriteRule

log = logging.getLogger(__name__)


def apply_rule(model: ir.Model, rule: RewriteRule, op_type: str) -> int:
    """Rewrite whatever a rule fits; at level debug, log why it does not fit what is left.

    Args:
        model: changed in place.
        rule: the rule.
        op_type: the operator that it is about; what fails before one is reached is not logged.

    Returns:
        How often it fired.
    """
    fired = int(rule.apply_to_model(model))
    if log.isEnabledFor(logging.DEBUG):
        rule.apply_to_model(model, tracer=_NearMisses(op_type))
    return fired


class _NearMisses(MatchingTracer):
    """Logs a reason for every match that failed; with a tracer, a rule changes nothing."""

    def __init__(self, op_type: str) -> None:
        super().__init__()
        self.op_type = op_type

    def log(self, rule: Any, container: Any, node: ir.Node, match: MatchResult, _: Any) -> None:
        names = [found.name for found in match.nodes if found.op_type == self.op_type]
        if names and not match:
            log.debug("%s %s is left as it is: %s", self.op_type, names[0], match.reason)
