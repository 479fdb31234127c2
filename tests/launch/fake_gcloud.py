"""A gcloud that plays a script: it notes each call, and what is rented after it.

    FOLDER/calls.jsonl   the words of each call
    FOLDER/rented.json   by name, the state of what is there, and how the run stands on its hosts
    FOLDER/play.json     answers to come, by kind of call

A call's kind is the verb of a queued resource, `scp`, `mkdir`, or the script that it runs. Without
an answer to come it does what the service does when all goes well. An answer is an object:

    out, err, code   what is said, and the exit code
    state            the request's state from now on; "" takes it away
    hosts            how the run stands on each host from now on; null for one that does not answer
    signal           is sent to the caller; what was asked is done nevertheless
"""

import json
import os
import sys
import time

# It is started hundreds of times, so it imports little.
FOLDER = os.environ.get("FAKE_GCLOUD", "")


def read(name: str):
    with open(f"{FOLDER}/{name}") as file:
        return json.load(file)


def write(name: str, value: object, mode: str = "w") -> None:
    with open(f"{FOLDER}/{name}", mode) as file:
        file.write(json.dumps(value) + "\n")


def main(argv: list[str]) -> int:
    write("calls.jsonl", argv, "a")
    kind, name = kind_of(argv)
    answer = next_answer(kind)
    rented = read("rented.json")
    out, err, code = usual(kind, name, argv, rented) if "code" not in answer else ("", "", 0)
    if "state" in answer:
        rented.setdefault(name, {"hosts": []})["state"] = answer["state"]
        if not answer["state"]:
            del rented[name]
    if "hosts" in answer:
        rented[name]["hosts"] = answer["hosts"]
        out = told(rented[name]["hosts"]) if kind == "state.sh" else out
    write("rented.json", rented)
    if "signal" in answer:
        os.kill(os.getppid(), answer["signal"])
        time.sleep(0.5)  # the caller ends it meanwhile, unless it pays no heed
    sys.stdout.write(answer.get("out", out))
    sys.stderr.write(answer.get("err", err))
    return answer.get("code", code)


def kind_of(argv: list[str]) -> tuple[str, str]:
    """The kind of a call, and the name of what it is about."""
    assert "--quiet" in argv, "it could ask"
    group, verb = argv[2], argv[3]
    assert argv[:2] == ["compute", "tpus"]
    if group == "queued-resources":
        return verb, argv[4]
    if verb == "scp":
        target = next(word for word in argv[4:] if ":bert-jax/" in word)
        return verb, target.partition(":")[0]
    (command,) = [word for word in argv if word.startswith("--command=")]
    words = command.removeprefix("--command=").split()
    return (words[0] if words[0] != "bash" else words[1].rpartition("/")[2]), argv[4]


def next_answer(kind: str) -> dict:
    play = read("play.json")
    answers = play.get(kind, [])
    if not answers:
        return {}
    answer = answers.pop(0)
    write("play.json", play)
    return answer


def usual(kind: str, name: str, argv: list[str], rented: dict) -> tuple[str, str, int]:
    """Output, errors and exit code when all goes well."""
    if kind == "create":
        if name in rented:
            return "", f"ERROR: (gcloud) ALREADY_EXISTS: {name}\n", 1
        count = read("hosts.json")
        rented[name] = {"state": "ACTIVE", "hosts": ["absent"] * count}
        return "", "", 0
    if name not in rented:
        return "", f"ERROR: (gcloud) NOT_FOUND: {name} was not found\n", 1
    there = rented[name]
    if kind == "describe":
        return there["state"] + "\n", "", 0
    if kind == "delete":
        del rented[name]
        return "", "", 0
    if there["state"] != "ACTIVE":
        return "", "ERROR: (gcloud) the node is not there\n", 1
    if kind == "start.sh":
        there["hosts"] = ["ended 0"] * len(there["hosts"])
    elif kind == "stop.sh":
        there["hosts"] = ["ended 75" if state == "running" else state for state in there["hosts"]]
    elif kind == "state.sh":
        return told(there["hosts"]), "", 0
    return "", "", 0


def told(hosts: list[str | None]) -> str:
    return "".join(f"bert-jax-host w-{i} {s}\n" for i, s in enumerate(hosts) if s is not None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
