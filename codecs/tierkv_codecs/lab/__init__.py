"""The quality lab: what a codec's loss does to a model's answers, measured offline."""
