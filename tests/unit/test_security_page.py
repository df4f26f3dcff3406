"""Every row of SECURITY.md has tests, by these names."""

import ast
from pathlib import Path

_SESSION = "tests/e2e/test_security.py"
_NAMES = "tests/security/test_names_and_folders.py"
_CRAFTED = "tests/security/test_crafted_messages.py"
_TLS = "tests/store/test_tls.py"
_MODELS = "tests/security/test_model_folders.py"
_SECRETS = "tests/security/test_secrets.py"
_REWARDS = "tests/unit/test_reward_pool.py"
_STORE = "tests/unit/test_blob_store.py"
_GUARD = "tests/dashboard/test_guard.py"
_TESTS = {
    "Redis of a session": (
        "tests/store/test_embedded_redis.py::test_lets_only_its_user_open_the_socket",
    ),
    "Redis at `--redis-url`": (
        f"{_TLS}::test_refuses_without_its_password_or_certificate",
        f"{_TLS}::test_refuses_a_certificate_of_another_name",
        f"{_TLS}::test_shows_a_certificate_of_its_own_to_a_server_that_asks",
        f"{_TLS}::test_reads_a_password_with_percent_signs",
        f"{_SESSION}::test_a_job_runs_over_tls_to_its_end_whatever_is_in_the_streams",
    ),
    "messages in the streams": (
        f"{_SESSION}::test_unreadable_messages_of_every_stream_become_dead_letters",
        f"{_CRAFTED}::test_what_cannot_be_read_is_a_store_error",
        f"{_CRAFTED}::test_no_readable_nonsense_ends_a_run",
        f"{_CRAFTED}::test_events_of_others_and_of_far_steps_change_nothing",
        f"{_NAMES}::test_nothing_on_a_wire_is_pickled",
    ),
    "Ray": (f"{_SESSION}::test_ray_refuses_a_wrong_and_a_missing_token",),
    "Ray's ports": (f"{_SESSION}::test_rays_ports_take_calls_with_the_token_only",),
    "a Ray cluster that a session joins (`--ray`)": (
        "tests/unit/test_cluster_plan.py::test_refuses_a_cluster_without_tokens",
        f"{_SESSION}::test_a_cluster_without_tokens_is_refused",
    ),
    "blobs in shared memory, in a cluster": (
        "tests/actors/test_blob_transfer.py::test_gives_away_no_other_file",
        "tests/actors/test_blob_transfer.py::test_gives_away_no_file_of_another_folder",
    ),
    "ranks' rendezvous (torch.distributed)": (
        "tests/trainer/test_process_group.py::test_a_rendezvous_listens_on_its_own_address_only",
    ),
    "dashboard": (
        f"{_GUARD}::test_changes_need_the_token",
        f"{_GUARD}::test_reading_from_other_hosts_needs_the_token",
        f"{_GUARD}::test_reading_through_a_proxy_needs_the_token",
        f"{_GUARD}::test_refuses_foreign_names_that_resolve_to_us",
        f"{_GUARD}::test_refuses_changes_from_another_sites_page",
    ),
    "session's folder, shared memory": (
        f"{_SESSION}::test_another_user_opens_nothing_of_a_session",
        f"{_NAMES}::test_uses_no_folder_that_another_user_made_under_its_name",
    ),
    "passwords and tokens": (
        f"{_SESSION}::test_no_log_journal_or_output_holds_a_secret",
        f"{_NAMES}::test_what_holds_a_password_is_readable_for_its_user_only",
        f"{_SECRETS}::test_config_show_names_the_variable_of_a_token",
        f"{_SECRETS}::test_a_judges_url_holds_no_password",
        f"{_SECRETS}::test_status_leaves_the_secrets_of_a_session_out",
    ),
    "a store of committed files (`--blobs`)": (
        f"{_STORE}::test_refuses_a_url_with_credentials_and_does_not_repeat_them",
        f"{_STORE}::test_a_damaged_object_is_never_read",
        "tests/e2e/test_bucket.py::test_a_job_goes_on_from_a_bucket_once_it_answers",
    ),
    "run's folder, with prompts and answers": (
        f"{_SESSION}::test_a_runs_folder_has_the_permissions_of_the_umask",
    ),
    "files outside of a run": (
        f"{_NAMES}::test_names_of_a_message_are_the_names_of_files",
        f"{_NAMES}::test_a_journal_of_another_run_names_no_other_files",
        f"{_MODELS}::test_an_index_of_weights_names_no_file_elsewhere",
        f"{_GUARD}::test_serves_no_file_outside_of_its_folder",
    ),
    "models": (
        f"{_MODELS}::test_python_in_a_models_folder_is_not_run",
        f"{_MODELS}::test_no_weights_of_a_policy_are_unpickled",
        f"{_MODELS}::test_nothing_but_weights_of_a_reward_model_is_unpickled",
        f"{_MODELS}::test_no_python_in_a_reward_models_folder_is_run",
    ),
    "reward functions, programs of answers": (
        "tests/unit/test_code_tests.py::test_runs_a_program_against_tests",
        "tests/unit/test_code_tests.py::test_a_program_sees_no_variable_of_the_environment",
        f"{_REWARDS}::test_uses_the_network_only_where_the_spec_says_so",
        f"{_REWARDS}::test_may_write_to_its_own_folder_and_to_those_of_the_spec",
        f"{_REWARDS}::test_failure_gets_the_fallback_and_the_next_answer_is_scored",
        f"{_REWARDS}::test_what_forks_without_end_is_ended_and_others_are_scored",
        "tests/preparation/test_prepare_job.py::test_runs_no_function_unconfined_unless_the_spec_says_so",
    ),
}


def test_every_row_has_a_test() -> None:
    lines = [x for x in Path("SECURITY.md").read_text().splitlines() if x.startswith("| ")]
    parts = [line.split("|")[1].strip() for line in lines]
    assert parts[1:] == list(_TESTS)
    for part, tests in _TESTS.items():
        assert tests, part
        for test in tests:
            file, _, name = test.partition("::")
            assert name in _functions(Path(file)), test


def _functions(file: Path) -> set[str]:
    found = ast.walk(ast.parse(file.read_text()))
    return {n.name for n in found if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}
