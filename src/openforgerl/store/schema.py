"""The schema of a run database, declared once.

`user_version` is `SCHEMA_VERSION`: a change of any statement here raises it by one. `application_id` marks the
file as ours, so that another program's database is refused instead of filled with our tables.
"""

from __future__ import annotations

APPLICATION_ID = 0x4F46524C
"""ASCII `OFRL`."""

SCHEMA_VERSION = 3

TABLES = """
-- Content: every JSON text, long string and image once, found by the sha256 of its stored bytes.
CREATE TABLE content (
    id INTEGER PRIMARY KEY,
    digest BLOB NOT NULL UNIQUE,
    data BLOB NOT NULL
);

-- Lists as chains: a list that extends another shares all nodes of the shorter one.
CREATE TABLE chain (
    id INTEGER PRIMARY KEY,
    prev INTEGER NOT NULL,              -- chain.id, 0 = start of a list
    item INTEGER NOT NULL REFERENCES content(id),
    UNIQUE (prev, item)
);

CREATE TABLE sessions (
    session_id TEXT PRIMARY KEY,
    state TEXT NOT NULL,
    sealed_at REAL,
    record BLOB NOT NULL
);

CREATE TABLE calls (
    id INTEGER PRIMARY KEY,
    call_id TEXT NOT NULL UNIQUE,
    session_id TEXT NOT NULL,
    idx INTEGER NOT NULL,
    status TEXT NOT NULL,
    base INTEGER REFERENCES calls(id),  -- the call whose prompt and sampled ids this prompt begins with
    common INTEGER NOT NULL,            -- how many ids of it
    new_ids BLOB NOT NULL,              -- the rest of the prompt
    prompt_sha256 BLOB NOT NULL,        -- over the whole prompt: damage is seen, not trained on
    common_origins INTEGER NOT NULL,
    new_origins BLOB NOT NULL,
    sampled_ids BLOB NOT NULL,
    logprobs BLOB,
    sampling_logprobs BLOB,
    detail BLOB NOT NULL,               -- everything else, content-addressed
    answer_sha256 BLOB NOT NULL,        -- over the four columns before it
    UNIQUE (session_id, idx)
);

CREATE TABLE runs (
    run_id TEXT PRIMARY KEY,
    config_digest TEXT NOT NULL,
    record BLOB NOT NULL
);

CREATE TABLE rollouts (
    position INTEGER PRIMARY KEY,       -- order of planning
    rollout_id TEXT NOT NULL UNIQUE,
    run_id TEXT NOT NULL REFERENCES runs(run_id),
    purpose TEXT NOT NULL,
    step INTEGER NOT NULL,
    record BLOB NOT NULL
);
CREATE INDEX rollouts_by_purpose ON rollouts (purpose, step);

CREATE TABLE attempts (
    position INTEGER PRIMARY KEY,
    attempt_id TEXT NOT NULL UNIQUE,
    rollout_id TEXT NOT NULL REFERENCES rollouts(rollout_id),
    number INTEGER NOT NULL,
    outcome TEXT,                       -- NULL until committed; then 'verdict' or 'failure'
    record BLOB NOT NULL,
    totals BLOB,                        -- conservation account of its samples; NULL without samples
    UNIQUE (rollout_id, number)
);
CREATE INDEX attempts_unfinished ON attempts (attempt_id) WHERE outcome IS NULL;

CREATE TABLE samples (
    sample_id TEXT PRIMARY KEY,
    attempt_id TEXT NOT NULL REFERENCES attempts(attempt_id),
    position INTEGER NOT NULL,
    ids BLOB NOT NULL,
    logprobs BLOB,
    detail BLOB NOT NULL,
    row_sha256 BLOB NOT NULL,           -- over the three columns before it
    UNIQUE (attempt_id, position)
);

CREATE TABLE steps (
    stage TEXT NOT NULL,
    step INTEGER NOT NULL,
    weights_version INTEGER NOT NULL,
    checkpoint TEXT NOT NULL,
    metrics BLOB NOT NULL,
    PRIMARY KEY (stage, step)
);

CREATE TABLE trained (
    attempt_id TEXT NOT NULL REFERENCES attempts(attempt_id),
    stage TEXT NOT NULL,
    step INTEGER NOT NULL,
    position INTEGER NOT NULL,
    UNIQUE (attempt_id, stage),         -- nothing trains twice
    FOREIGN KEY (stage, step) REFERENCES steps(stage, step)
);

CREATE TABLE stored_values (
    key TEXT PRIMARY KEY,
    value BLOB NOT NULL
);
"""
