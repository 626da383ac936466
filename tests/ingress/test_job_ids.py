import os

from inferry.ingress.job_ids import new_job_id


def test_ids_of_a_forked_process_differ_from_those_of_its_parent() -> None:
    receiver, sender = os.pipe()
    parent = new_job_id()
    pid = os.fork()
    if pid == 0:
        os.write(sender, new_job_id().encode())
        os._exit(0)
    os.waitpid(pid, 0)
    child = os.read(receiver, 100).decode()
    os.close(receiver)
    os.close(sender)
    assert child.partition("-")[0] != parent.partition("-")[0]
