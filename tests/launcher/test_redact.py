"""What leaves the site holds no secret: behind names, in known forms, by value; and what is none stays readable."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stoker.launcher.redact import Redactor

HEX = "0123456789abcdef0123456789abcdef01234567"
PEM = "-----BEGIN RSA PRIVATE KEY-----\nMIIEow/abc+def==\nxyz\n-----END RSA PRIVATE KEY-----"


# What must go stands as S3CR3T, what must stay is the rest.
HIDDEN = [
    "export HF_TOKEN=S3CR3T && python train.py",
    "export HF_TOKEN='S3CR3T with blanks'; python x",
    "+ HF_TOKEN=S3CR3T",
    '{"env": {"HF_TOKEN": "S3CR3T"}, "tokens": 2048, "tokens_per_second": 7314.5}',
    '{"api_keys": ["S3CR3T", "S3CR3T two"], "x": 1}',
    '"command": "stoker launch password=S3CR3T train.steps=3"',
    r'"line": "{\"api_key\": \"S3CR3T\", \"a\": 1}"',
    "environ({'AWS_SECRET_ACCESS_KEY': 'S3CR3T', 'HOME': '/root'})",
    "[('DB_PASSWORD', 'S3CR3T'), ('A', 'b')]",
    "note: password: S3CR3T",
    "fit(token='S3CR3T', steps=3)",
    "tool --api-key S3CR3T --steps 5",
    "tool --token=S3CR3T",
    "git clone https://me:S3CR3T@example.com/x.git",
    "git clone https://S3CR3T@example.com/x.git",
    "GET https://h.example/a?x=1&access_token=S3CR3T&y=2 200",
    "GET https://acc.blob.example/c/b?sv=2020&sig=S3CR3T&se=1",
    "Authorization: Bearer S3CR3T.abc",
    "curl -H 'Authorization: Basic S3CR3T'",
    "machine api.wandb.ai login user password S3CR3T",
    "machine api.wandb.ai\n  login user\n  password S3CR3T\n",
    "api_keys:\n  - S3CR3T\n  - S3CR3T2\nsteps: 3",
    "client_secret: |\n  S3CR3T\nsteps: 3",
    "AccountingStoragePass   = S3CR3T",
    "HF_TOKEN=\"S3CR3T and no end",
    f"{PEM.replace('MIIEow', 'S3CR3T')}",
    "-----BEGIN OPENSSH PRIVATE KEY-----\nS3CR3T\nand then the log was cut",
    "-----BEGIN PGP PRIVATE KEY BLOCK-----\n\nS3CR3T\n=abc\n-----END PGP PRIVATE KEY BLOCK-----",
    'tool --api-key "S3CR3T and more" --steps 5',
    "tool --password 'S3CR3T' --steps 5",
    r'"tool --token \"S3CR3T\" --steps 5"',
    "PGPASSWORD=S3CR3T DBPASS=S3CR3T2 SSHPASS='S3CR3T3' python train.py",
    '{"userpassword": "S3CR3T", "clientsecret": "S3CR3T2", "steps": 3}',
    "export HFTOKEN=S3CR3T SECRETKEY=S3CR3T1 MY_PW=S3CR3T2 GITHUB_PAT=S3CR3T3 SLURM_JWT=S3CR3T4",
    "AZURE_STORAGE_CONNECTION_STRING='AccountName=a;AccountKey=S3CR3T' python train.py",
    "curl -u me:S3CR3T https://example.com",
    "curl --user 'me:S3CR3T' https://example.com",
    "mysql -h db -u root -pS3CR3T steps",
    "sshpass -p S3CR3T ssh example.com",
    "sshpass -p 'S3CR3T x' ssh example.com",
    "\x1b[1mpassword:\x1b[0m \x1b[32mS3CR3T\x1b[0m steps",
    r'{"log": "\u001b[1mpassword:\u001b[0m \u001b[32mS3CR3T\u001b[0m steps"}',
    "password:\rS3CR3T",
    "HF_TO\u00adKEN=S3CR3T",
    "postgresql://me:x@S3CR3T@example.com/steps",
    "s3://key:se/S3CR3T@bucket steps",
    "Cookie: a=1; b=S3CR3T\nsteps",
    "S3CR3Tabc==\n-----END RSA PRIVATE KEY-----\nrest",
]  # fmt: skip


@pytest.mark.parametrize("text", HIDDEN)
def test_what_stands_behind_a_name_goes(text: str) -> None:
    found = Redactor({}).clean(text)
    assert "S3CR3T" not in found
    assert "<secret-1>" in found
    for word in ("steps", "train.py", "2048", "7314.5", "example.com", "/root", "rest", "y=2", "se=1"):
        assert (word in found) == (word in text)


@pytest.mark.parametrize(
    "secret",
    [
        HEX, "hf_abcdefghijklmnopQRSTUV", "AKIAIOSFODNN7EXAMPLE", "ASIAIOSFODNN7EXAMPLE",
        "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", "ghp_abcdefghijklmnopqrstuvwxyz0123456789",
        "github_pat_11ABCDEFG0abcdefghij_abcdefghij", "glpat-abcdefghij0123456789", "xoxb-123456789012-abcdef",
        "sk-proj-abcdefghij0123456789", "nvapi-abcdefghij0123456789_-x", f"local-{HEX}",
        "wandb_v1_abcdefghijklmnopqrstuvwxyz012345", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJl",
        "AIzaSyA0123456789abcdefghijklmnopqrstuv",
    ],
)  # fmt: skip
def test_known_forms_go_wherever_they_stand(secret: str) -> None:
    for text in (f"error near {secret}, retrying", f'["{secret}"]', f"x: {secret}\n", secret):
        assert secret not in Redactor({}).clean(text)


def test_a_value_of_the_environment_goes_wherever_it_stands_by_one_number() -> None:
    redactor = Redactor({"MY_TOKEN": "correct horse", "OTHER_SECRET": "short", "PATH": "/usr/bin"})
    assert redactor.clean("got 'correct horse' from correct horse; /usr/bin; short") == (
        "got '<secret-1>' from <secret-1>; /usr/bin; short"
    )


def test_what_one_text_gives_away_is_masked_in_another() -> None:
    redactor = Redactor({})
    texts = ["request with battery-staple failed", "export X_PASSWORD=battery-staple"]
    for text in texts:
        redactor.learn(text)
    assert [redactor.clean(t) for t in texts] == ["request with <secret-1> failed", "export X_PASSWORD=<secret-1>"]


def test_json_is_masked_by_its_structure() -> None:
    value = {"a": [{"tokens": 5, "keys": {"x": 1}}], "my_secret": {"deep": ["one", {"two": "three"}], "n": None}}
    assert Redactor({}).clean_json(value) == {
        "a": [{"tokens": 5, "keys": {"x": 1}}],
        "my_secret": {"deep": ["<secret-1>", {"two": "<secret-2>"}], "n": None},
    }


@pytest.mark.parametrize(
    "text",
    [
        "HF_TOKEN=$HF_TOKEN WANDB_API_KEY=${KEY} X_SECRET=$(cat f)",
        '{"step": 3, "tokens": 2048, "tokens_per_second": 7314.0, "consumed_tokens": 99, "token": null}',
        f'{{"git": {{"sha": "{HEX}", "dirty": true}}}}',
        f"HEAD is now at {HEX}",
        "unknown key=train.stepz; did you mean train.steps",
        "PWD=/home/me/project tokenizer=/data/tok.json",
        "File \"/x/train.py\", line 3 in forward",
        "sha256 0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef",
        "AuthInfo=socket=/run/munge.socket",
        "/lustre/projects/genomics/runs/alpha",
        "KeyError: 'model'",
        "data.validation_tokens: 2_000",
    ],
)  # fmt: skip
def test_what_is_no_secret_stays(text: str) -> None:
    assert Redactor({}).clean(text) == text


def test_commits_that_are_known_stay_and_other_such_numbers_go() -> None:
    other = HEX[::-1]
    assert Redactor({}, [HEX]).clean(f"{HEX} {other}") == f"{HEX} <secret-1>"


@settings(max_examples=40)
@given(st.text(max_size=120))
def test_any_text_is_taken_and_cleaning_again_changes_nothing(text: str) -> None:
    redactor = Redactor({})
    once = redactor.clean(text)
    assert redactor.clean(once) == once


@settings(max_examples=40)
@given(st.text("abcXYZ019-_", min_size=8, max_size=30), st.sampled_from(["{}", '"{}"', "'{}'"]))
def test_any_value_behind_a_name_goes(value: str, form: str) -> None:
    text = json.dumps({"log": "MY_TOKEN=" + form.format("v" + value) + " end"})
    assert "v" + value not in Redactor({}).clean(text)


@pytest.mark.parametrize("piece", ["a", 'x="', "token: ", "A1/", "\n- ", "a.b-"])
def test_the_time_grows_with_the_length_only(piece: str) -> None:
    def seconds(count: int) -> float:
        began = time.process_time()
        Redactor({}).clean(piece * count)
        return time.process_time() - began

    assert seconds(16_000) < 12 * seconds(4_000) + 1
