"""The program that runs one task with the OpenHands SDK, which is a library: what its own documentation writes.

It is a text, since it is run by another Python with other packages. Settings come as JSON on standard input; the last
line of its output is an object with how the conversation ended and the agent's last word.
"""

DRIVER = '''\
"""One task with the OpenHands SDK."""
import json
import sys

from pydantic import SecretStr

from openhands.sdk import LLM, Agent, Conversation, Tool
from openhands.sdk.conversation.response_utils import get_agent_final_response
from openhands.tools.file_editor import FileEditorTool
from openhands.tools.task_tracker import TaskTrackerTool
from openhands.tools.terminal import TerminalTool

settings = json.load(sys.stdin)
known = {"terminal": TerminalTool, "file_editor": FileEditorTool, "task_tracker": TaskTrackerTool}
model = settings["llm"]
agent = Agent(
    llm=LLM(**{**model, "api_key": SecretStr(model["api_key"])}),
    tools=[Tool(name=known[name].name) for name in settings["tools"]],
)
conversation = Conversation(
    agent=agent,
    workspace=settings["workspace"],
    max_iteration_per_run=settings["max_iterations"],
    visualizer=None,
)
conversation.send_message(settings["task"])
conversation.run()
events = list(conversation.state.events)
codes = [event.code for event in events if hasattr(event, "code")]
status = conversation.state.execution_status
print(
    json.dumps(
        {
            "status": getattr(status, "value", str(status)),
            "code": codes[-1] if codes else "",
            "final": get_agent_final_response(events),
        }
    )
)
'''
"""Python 3.12; needs `openhands-sdk` and `openhands-tools`."""
