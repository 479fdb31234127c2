"""A kubectl that plays a script: it notes each call, and what a cluster holds after it.

    FOLDER/calls.jsonl   the words of each call
    FOLDER/cluster.json  by kind, what was applied; a JobSet with its status and pods
    FOLDER/play.json     answers to come, by verb: get, pods, apply, delete, logs, config

Without an answer to come it does what a cluster does when all goes well. An answer is an object:

    out, err, code   what is said, and the exit code
    made             kinds that are made all the same
    status, pods     of the JobSet from now on
    signal           is sent to the caller
"""

import json
import os
import pathlib
import sys
import time

FOLDER = pathlib.Path(os.environ["FAKE_KUBECTL"])
POD = {"status": {"phase": "Running"}}


def main(argv: list[str]) -> int:
    with (FOLDER / "calls.jsonl").open("a") as file:
        file.write(json.dumps(argv) + "\n")
    verb = verb_of(argv)
    play = json.loads((FOLDER / "play.json").read_text())
    answer = (play.get(verb) or [{}]).pop(0)
    (FOLDER / "play.json").write_text(json.dumps(play))
    holds = json.loads((FOLDER / "cluster.json").read_text())
    out = ""
    if "signal" in answer and verb == "apply":
        holds |= applied(argv, ["ConfigMap"])
    if "code" not in answer and "signal" not in answer:
        out = usual(verb, argv, holds)
    elif verb == "apply" and "made" in answer:
        holds |= applied(argv, answer["made"])
    if "JobSet" in holds and answer.keys() & {"status", "pods"}:
        holds["JobSet"]["status"] = answer.get("status", {})
        holds["JobSet"]["pods"] = answer.get("pods", [])
        out = usual(verb, argv, holds)
    (FOLDER / "cluster.json").write_text(json.dumps(holds))
    if "signal" in answer:
        os.kill(os.getppid(), answer["signal"])
        time.sleep(60)  # the caller ends it
    sys.stdout.write(answer.get("out", out))
    sys.stderr.write(answer.get("err", ""))
    return answer.get("code", 0)


def verb_of(argv: list[str]) -> str:
    """What is asked for."""
    words = [word for word in argv if not word.startswith("-")]
    return "pods" if words[:2] == ["get", "pods"] else words[0]


def applied(argv: list[str], kinds: list[str]) -> dict:
    """What the file says, of these kinds; a cluster takes nothing that is not valid."""
    import cluster
    import yaml

    (path,) = [word.removeprefix("--filename=") for word in argv if word.startswith("--filename=")]
    found = list(yaml.safe_load_all(pathlib.Path(path).read_text()))
    for one in found:
        cluster.validate(one)
    return {one["kind"]: one for one in found if one["kind"] in kinds}


def usual(verb: str, argv: list[str], holds: dict) -> str:
    """What a cluster says and does when all goes well."""
    if verb == "config":
        return "the-context\n"
    if verb == "apply":
        holds |= applied(argv, ["ConfigMap", "JobSet"])
        group = holds["JobSet"]["spec"]["replicatedJobs"][0]
        holds["JobSet"]["pods"] = [POD] * group["template"]["spec"]["completions"]
    if verb == "delete":
        kinds = next(word for word in argv if "configmap" in word).split(",")
        for kind in [kind for kind in holds if kind.lower() in kinds]:
            del holds[kind]
    jobset = dict(holds.get("JobSet", {}))
    if verb == "get" and jobset and jobset["metadata"]["name"] not in argv:
        jobset = {}
    pods = jobset.pop("pods", [])
    if verb == "get":
        return json.dumps(jobset) if jobset else ""
    if verb == "pods":
        return json.dumps({"items": pods})
    return "said\n" if verb == "logs" else ""


if __name__ == "__main__":
    sys.path.insert(0, str(pathlib.Path(__file__).parent))
    sys.exit(main(sys.argv[1:]))
