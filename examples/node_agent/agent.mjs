// An agent that answers a question about a shop with two tools. The task is on standard input, the answer is the output.
import { readFileSync } from "node:fs";

const { OPENAI_BASE_URL, OPENAI_API_KEY, OPENAI_MODEL: model } = process.env;
const { question, shop } = JSON.parse(readFileSync(0, "utf8"));

const parameters = { properties: { item: { type: "string" } }, required: ["item"], type: "object" };
const tool = (name, description) => ({ type: "function", function: { name, description, parameters } });
const tools = [tool("price", "Return the price of an item."), tool("stock", "Return how much of an item is left.")];

async function reply(messages) {
  const response = await fetch(`${OPENAI_BASE_URL}/chat/completions`, {
    method: "POST",
    headers: { Authorization: `Bearer ${OPENAI_API_KEY}`, "Content-Type": "application/json" },
    body: JSON.stringify({ model, messages, tools, max_completion_tokens: 40 }),
  });
  if (!response.ok) throw new Error(`${response.status} ${await response.text()}`);
  return (await response.json()).choices[0].message;
}

function call({ name, arguments: json }) {
  const { item } = JSON.parse(json) ?? {};
  return shop[item]?.[name] ?? `There is no ${item}.`;
}

const messages = [
  { role: "system", content: "You answer questions about a shop. Use the tools." },
  { role: "user", content: question },
];
for (let turn = 0; turn < 3; turn++) {
  const message = await reply(messages);
  if (!message.tool_calls) {
    console.log(message.content);
    break;
  }
  messages.push(message);
  for (const { id, function: called } of message.tool_calls)
    messages.push({ role: "tool", tool_call_id: id, content: call(called) });
}
