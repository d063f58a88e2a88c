"""Score programs: functions from a raw score to the final score, their gradients, and the blocks that they hide."""
