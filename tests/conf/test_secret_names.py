"""Which names of variables are taken for those of keys."""

from __future__ import annotations

import pytest
from stoker.conf.secret_names import is_secret, secrets_in


@pytest.mark.parametrize(
    "name",
    ["WANDB_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "MY_KEY", "OPENAI_APIKEY", "DB_PASSWORD", "PGPASSWORD",
     "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "GH_SECRET", "aws_session_token", "AZURE_CREDENTIALS",
     "wandb_api_key", "apiKey", "api-key", "password", "DB_PASSWD", "my_pwd", "GH_TOKEN_READ", "clientSecret",
     "Authorization", "AccountingStoragePass", "SSH_PRIVATE_KEY", "LICENSE_KEY", "cluster.env.HF_TOKEN", "tokens",
     "DBPASS", "SSHPASS", "HFTOKEN", "userpassword", "clientsecret", "SECRETKEY", "MY_PW", "GITHUB_PAT", "SLURM_JWT",
     "AZURE_STORAGE_CONNECTION_STRING"],
)  # fmt: skip
def test_names_of_secrets(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize(
    "name",
    ["TOKENIZERS_PARALLELISM", "NCCL_DEBUG", "KEYBOARD", "MONKEY", "SECRETARY", "PATH", "TOKEN_LIMIT", "HF_TOKEN_PATH",
     "PWD", "OLDPWD", "tokenizer", "num_kv_heads", "key", "cache_key", "KeyError", "AuthInfo", "passes", "AuthType",
     "AUTHOR", "NCCL_BYPASS", "file_pat", "STRING"],
)  # fmt: skip
def test_names_that_only_look_alike(name: str) -> None:
    assert not is_secret(name)


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("export WANDB_API_KEY=abc", ["WANDB_API_KEY"]),
        ("HF_TOKEN='a b' python x.py", ["HF_TOKEN"]),
        ('A=1; export MY_SECRET="x"', ["MY_SECRET"]),
        ("export HF_TOKEN=$(cat ~/.token)", []),
        ('export HF_TOKEN="$HF_TOKEN"', []),
        ("module load cuda/12.8", []),
    ],
)
def test_secrets_written_out_in_a_line(line: str, names: list[str]) -> None:
    assert secrets_in(line) == names
