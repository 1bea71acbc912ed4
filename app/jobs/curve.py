"""The rewards of a run as a curve of characters, for the end of its log."""

from collections.abc import Sequence

from app.jobs.metrics import StepRecord

WIDTH, HEIGHT = 72, 14  # characters


def reward_curve(records: Sequence[StepRecord]) -> str:
    """Reward over steps; empty with fewer than two steps, or without plotext."""
    try:
        import plotext
    except ImportError:  # of the extra `rl`
        return ""
    if len(records) < 2:
        return ""
    figure = plotext.figure
    figure.clear()
    figure.plot_size(WIDTH, HEIGHT)
    figure.title("mean reward of each step")
    steps = [record.step for record in records]
    figure.draw(figure.signal(steps, [record.reward for record in records]).lines())
    return str(plotext.uncolorize(str(figure.build()))).rstrip()
