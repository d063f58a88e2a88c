"""Which kernel runs an attention: reasons, evidence, an estimate, and self-checks."""
