"""The command line. Exit codes: 0 ok, 1 a job failed, 2 wrong usage or input, 3 no session."""

import sys
from typing import Any

import typer

from cli import (
    check_data,
    config,
    dashboard,
    demo,
    doctor,
    evaluate,
    export,
    job_commands,
    ledger,
    reward,
    run_benchmarks,
    samples,
    session_commands,
    simulate,
    top,
    trace,
    train_drafter,
)
from cli.output import complain
from tlt.errors import ConfigError, NoSession, StoreError, TltError


class _App(typer.Typer):
    """Turns our exceptions into one line and an exit code; everything else is a bug and shows."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)
        except NoSession as error:
            complain(str(error))
            sys.exit(3)
        except (ConfigError, StoreError) as error:
            complain(str(error))
            sys.exit(2)
        except TltError as error:
            complain(str(error))
            sys.exit(1)


app = _App(
    name="tlt",
    help="Reinforcement learning of reasoning models, without the wait for the long tail.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command("demo")(demo.demo)
app.command("doctor")(doctor.doctor)
app.command("up")(session_commands.up)
app.command("down")(session_commands.down)
app.command("status")(session_commands.status)
app.command("submit")(job_commands.submit)
app.command("retry")(job_commands.retry)
app.command("jobs")(job_commands.list_jobs)
app.command("logs")(job_commands.logs)
app.command("ledger")(ledger.ledger)
app.command("samples")(samples.samples)
app.command("trace")(trace.trace)
app.command("pause")(job_commands.pause)
app.command("resume")(job_commands.resume)
app.command("cancel")(job_commands.cancel)
app.command("dashboard")(dashboard.dashboard)
app.command("top")(top.top)
app.command("eval")(evaluate.evaluate)
app.command("simulate")(simulate.simulate)
app.command("bench")(run_benchmarks.bench)
app.add_typer(config.app, name="config")
app.add_typer(check_data.app, name="data")
app.add_typer(train_drafter.app, name="drafter")
app.add_typer(export.app, name="export")
app.add_typer(reward.app, name="reward")

if __name__ == "__main__":
    app()
