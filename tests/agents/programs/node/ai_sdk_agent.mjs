// Vercel's AI SDK in a session: `node ai_sdk_agent.mjs chat|responses`, with the scenario on standard input.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, isStepCount, streamText, tool } from "ai";
import { readFileSync } from "node:fs";
import { z } from "zod";

const { OPENAI_BASE_URL: baseURL, OPENAI_API_KEY: apiKey, OPENAI_MODEL: name } = process.env;
const model =
  process.argv[2] === "responses"
    ? createOpenAI({ baseURL, apiKey })(name)
    : createOpenAICompatible({ name: "art-nb", baseURL, apiKey })(name);

const weather = tool({
  description: "Return the weather in a city.",
  inputSchema: z.object({ city: z.string() }),
  execute: async () => "sunny",
});
const ask_expert = tool({
  description: "Ask the expert on the weather.",
  inputSchema: z.object({ question: z.string() }),
  execute: async ({ question }) => await answer(question, { weather }),
});

async function answer(prompt, tools, stream = false) {
  const options = { model, prompt, tools, stopWhen: isStepCount(3) };
  return stream ? await streamText(options).text : (await generateText(options)).text;
}

const { question, form } = JSON.parse(readFileSync(0, "utf8"));
const text = await answer(question, form === "two_agents" ? { ask_expert } : { weather }, form === "stream");
console.log(JSON.stringify({ reward: Number(text.includes("sunny")) }));
