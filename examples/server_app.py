"""A ServerApp of your own that trains with pFedHN, as it would with one of Flower's strategies (docs/python.md)."""

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from hyperbloom import PFedHNPC

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train, and print the accuracy over the rounds."""
    strategy = PFedHNPC(clients=2, cohort=2, local={"steps": 5}, run_dir=context.run_config["run-dir"])
    result = strategy.start(grid=grid, initial_arrays=ArrayRecord(), num_rounds=2)
    print(result.evaluate_metrics_clientapp)
