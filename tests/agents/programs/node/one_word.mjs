// Ask the model for one word, with Vercel's AI SDK. The prompt is on standard input.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText } from "ai";
import { readFileSync } from "node:fs";

const { OPENAI_BASE_URL: baseURL, OPENAI_API_KEY: apiKey, OPENAI_MODEL: name } = process.env;
const { text } = await generateText({
  model: createOpenAICompatible({ name: "art-nb", baseURL, apiKey })(name),
  instructions: "Answer with one word.",
  prompt: readFileSync(0, "utf8"),
  maxOutputTokens: 5,
});
console.log(text);
