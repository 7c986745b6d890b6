"""Flower's simulation: Ray actors, one for each core."""

import sys

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from pace import Pace
from work import Work, work_of


def client_app(folder: str) -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        work = work_of(folder)
        model = work.model()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        inputs, labels = work.client(int(context.node_config["partition-id"]))
        steps = work.train(model, inputs, labels)
        found = MetricRecord({"num-examples": len(labels), "steps": steps})
        content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": found})
        return Message(content=content, reply_to=message)

    return app


def server_app(work: Work, pace: Pace, found: dict[str, float]) -> ServerApp:
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        model = work.model()

        def between_rounds(done: int, arrays: ArrayRecord) -> MetricRecord:
            """Flower evaluates here; so it is called before the first round and after each."""
            if done:
                pace.lap()
            else:
                pace.ready()
            if done < work.rounds:
                pace.go()
            return MetricRecord()

        strategy = FedAvg(
            fraction_train=work.cohort / work.clients, fraction_evaluate=0.0, min_train_nodes=work.cohort
        )  # fmt: skip
        result = strategy.start(
            grid=grid, initial_arrays=ArrayRecord(model.state_dict()), num_rounds=work.rounds,
            evaluate_fn=between_rounds,
        )  # fmt: skip
        model.load_state_dict(result.arrays.to_torch_state_dict())
        found["accuracy"] = work.accuracy(model)
        found["steps"] = round(sum(m["steps"] * work.cohort for m in result.train_metrics_clientapp.values()))

    return app


def main(folder: str) -> None:
    pace, work, found = Pace(), Work(folder), {}
    torch.set_num_threads(1)
    run_simulation(
        server_app(work, pace, found),
        client_app(folder),
        num_supernodes=work.clients,
        backend_config={
            "init_args": {"num_cpus": work.workers, **({} if work.device == "cpu" else {"num_gpus": 1})},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0 if work.device == "cpu" else 1.0},
        },
    )
    pace.end(**found)


if __name__ == "__main__":
    main(sys.argv[1])
