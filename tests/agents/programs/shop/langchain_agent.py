"""The agent with LangChain: a rollout that art.langgraph records."""

from langchain.agents import create_agent
from langchain.agents.middleware import ModelCallLimitMiddleware
from shop import SYSTEM, look_up, score

import art_nb as art


@art.langgraph.wrap_rollout
async def rollout(model, task):
    """Answer a question."""

    def price(item: str) -> str:
        """Return the price of an item."""
        return look_up(task, "price", item)

    def stock(item: str) -> str:
        """Return how much of an item is left."""
        return look_up(task, "stock", item)

    chat_model = art.langgraph.init_chat_model(max_completion_tokens=40)
    limit = ModelCallLimitMiddleware(run_limit=3, exit_behavior="end")
    agent = create_agent(chat_model, tools=[price, stock], system_prompt=SYSTEM, middleware=[limit])
    result = await agent.ainvoke({"messages": [{"role": "user", "content": task["question"]}]})
    return art.Trajectory(**score(result["messages"][-1].content, task))
